"""Shows and sums up a run: progress bar, summary, plots. Plain data in, text and figures out."""
