"""Hugging Face checkpoints and Megatron-Core parameters, in both directions from one description.

`architecture` reads config.json, `families` says which Megatron parameter is made of which HF tensors, `mapping` and
`rules` split and merge them over tensor-parallel ranks, `hf` reads and writes the files, `loading` and `export` are
what a trainer calls. Imports neither the trainer nor the rollout service. `architecture` and `families` import no
torch, so that a launch check stays fast.
"""
