"""DeepSeek-V4's attention: one key-value head, a window of tokens, and entries that stand for 4 or 128 tokens each.

See ``docs/deepseek-v4.md``. ``attention`` has a layer's weights and its plain forward pass, ``fold`` how tokens become entries,
``family`` attention over a paged cache, ``streams`` the residual connection.
"""
