"""The model that a run has trained: merging its adapters, chatting with it, its model card, and the Hub.

``merge`` and ``Chat`` are used by others. Models are opened in processes of their own (``merge_process.py``,
``chat_process.py``), so that no kernel imports torch for them.
"""
