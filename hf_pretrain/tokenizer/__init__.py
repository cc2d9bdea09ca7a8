"""
Tokenizers and chat templates: train, save, load and check a tokenizer, and encode documents and conversations.

Only the chat template writes control tokens. A text that contains the characters of a control token stays text. This
package may import `model` and `runtime`. It re-exports nothing: its module `training` imports the library `datasets`,
and users of the other modules must not wait for that.
"""
