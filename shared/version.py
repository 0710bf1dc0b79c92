"""Version that every service reports and the package is built with."""

VERSION = "0.1.0"


def version_text() -> str:
    """Returns the version for people: `0.1.0 (commit a1b2c3d4e5)`, without the commit where it is unknown."""
    from quire.shared.build_commit import commit

    return f"{VERSION} (commit {commit()})" if commit() else VERSION
