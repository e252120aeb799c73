"""Fine-tuning examples: rows of a data source, their format, chat template, loss mask, and a preview of them.

``open_rows`` reads any data source; ``recognize_format`` says what its columns mean; ``Encoder`` turns an
example into tokens, each with whether it bears loss; ``preview_examples`` shows them before anything runs.
"""
