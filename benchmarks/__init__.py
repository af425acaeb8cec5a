"""The commands behind the figures of the README."""
