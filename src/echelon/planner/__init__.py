"""What training will do, before it does it: from the script alone, on this machine."""
