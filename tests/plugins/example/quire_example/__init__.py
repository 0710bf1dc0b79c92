"""Example plugin package that test_plugins.py installs."""
