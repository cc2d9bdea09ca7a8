"""Programs for users to copy and change."""
