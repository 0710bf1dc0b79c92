"""The version that every service reports and the package is built with."""

VERSION = "0.1.0"
