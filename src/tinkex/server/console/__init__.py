"""Web pages that show runs to a person."""
