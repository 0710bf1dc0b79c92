"""What test_plugins.py installs."""
