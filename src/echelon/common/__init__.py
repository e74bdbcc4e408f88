"""Small tools shared by the other rooms: errors, arguments, files, locks, text for terminals. No torch."""
