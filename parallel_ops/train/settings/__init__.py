"""Sections of a settings file and checks between them."""
