"""Small tools that two rooms would else copy: errors, arguments, files, locks, text for terminals. No torch."""
