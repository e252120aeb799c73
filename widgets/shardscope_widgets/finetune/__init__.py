"""Views of fine-tuning: a chat with the base and the tuned model side by side.

``ChatView`` is the only name that others use.
"""

from shardscope_widgets.finetune.view import ChatView

__all__ = ["ChatView"]
