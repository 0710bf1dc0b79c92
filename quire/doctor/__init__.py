"""What stands between this machine and a cluster that serves: looked at one thing after the other, nothing changed."""
