"""What a cluster would do, before it trains: descriptions of clusters, simulated runs, recommendations."""
