"""What tests share: ranks that stand by, small models, runs in folders."""
