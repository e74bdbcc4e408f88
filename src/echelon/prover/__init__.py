"""Is it right? One program under every strategy, held against plain PyTorch."""
