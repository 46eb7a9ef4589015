"""The spec that the page shows is held to what is printed."""

from tests.docs_output import checked_print

print = checked_print("docs/guides/windows-by-field.md")
