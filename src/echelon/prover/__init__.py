"""Is it right? One program under every layout, held against plain PyTorch."""
