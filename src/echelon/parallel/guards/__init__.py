"""What watches that ranks do the same, and says what they do not."""
