"""What every room may import: registration of ops, argument checks, process groups, torch versions.

Imports torch alone.
"""
