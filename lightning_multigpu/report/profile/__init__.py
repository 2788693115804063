"""A profile as a document, a page and text."""
