"""Is it right? One program under every layout, compared with plain PyTorch."""
