"""The messages that the page shows are held to those that are raised."""

from tests.docs_output import checked_print

print = checked_print("docs/guides/groups.md")
