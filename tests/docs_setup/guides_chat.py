"""What the page shows is held to what its code prints."""

from tests.docs_output import checked_print

print = checked_print("docs/guides/chat.md")
