"""Virtual cluster: the production engine for many ranks, in virtual time."""
