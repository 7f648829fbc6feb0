"""The version of this package; the build and the release tool read it here."""

__version__ = "0.1.0"
