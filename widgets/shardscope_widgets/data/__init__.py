"""The data of a fine-tune before it runs: its format and size, and which tokens bear loss.

``DataPanel`` stands below the task picker's input, ``PreviewView`` on the Studio's Data tab.
"""
