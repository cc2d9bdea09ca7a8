"""
The MiniMind model: configuration, presets, decoder, attention over packed sequences, experts and loss.

This package may import `runtime` and nothing else; it knows nothing about tokenizers, data or training. The modules in
`configuration_minimind.CODE_FILES` travel to the Hub with every checkpoint and import only each other. `presets`
does not travel. The package `hf_pretrain` itself exports the names that users import.
"""
