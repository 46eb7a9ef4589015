"""Chats: messages, templates that render messages to text, and masks of the tokens that an assistant generated.

Templates are Jinja programs. ``pip install 'mouse-data[text]'`` installs Jinja, which is imported at the first use.
"""

from mouse_core.text.chat.encoding import (
    Chats,
    ChatTemplate,
    ChatTokens,
    EncodedChat,
    Message,
    Preferences,
    RenderedChat,
    encode_chat,
    encode_preference,
    render_chat,
)

__all__ = [
    "ChatTemplate",
    "ChatTokens",
    "Chats",
    "EncodedChat",
    "Message",
    "Preferences",
    "RenderedChat",
    "encode_chat",
    "encode_preference",
    "render_chat",
]
