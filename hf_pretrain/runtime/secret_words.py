"""
Hide passwords and access tokens in what is printed or recorded.

The command reads this file without importing the package, so it imports only the standard library.
"""

import re
from collections.abc import Sequence


_NAME = r"[\w-]*(?:token|key|secret|password|passwd|signature|sig)"
# `--pad_token` and its siblings name words of a vocabulary.
_FLAG = rf"--(?!(?:pad|eos|bos|unk|mask|sep|cls)[_-]){_NAME}"
# The value of a flag, also of one within a word (`--sft_args "--hub_token X"`), the signature and the login of an
# address, and tokens of the Hub wherever they stand.
_WITHIN = rf"(?:^|[\s='\"]){_FLAG}(?:\s+|=)"
_VALUE = r"(?:'[^']*'|\"[^\"]*\"|['\"]?[^\s'\"]+)"
_SECRETS = rf"(^{_FLAG}=).+|({_WITHIN}){_VALUE}|([?&]{_NAME}=)[^&]+|(://)[^/]+(?=@)|\bhf_[A-Za-z0-9]{{20,}}"


def hide_secrets(words: Sequence[str]) -> list[str]:
    """Return the words of a command with `<token>` in place of secrets."""
    is_value = [False, *(re.fullmatch(_FLAG, word, re.IGNORECASE) is not None for word in words)]
    hidden = (re.sub(_SECRETS, _replace, word, flags=re.IGNORECASE) for word in words)
    return ["<token>" if follows else word for follows, word in zip(is_value, hidden, strict=False)]


def _replace(match: re.Match[str]) -> str:
    return "".join(filter(None, match.groups())) + "<token>"
