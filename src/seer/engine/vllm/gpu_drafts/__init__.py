# SPDX-License-Identifier: Apache-2.0
"""Grouped drafts that live on the GPU, inside stock vLLM's newest model runner.

    kernels      Triton: append tokens, index n-grams, draft, accept
    store        the token arena and n-gram table of the groups: who holds what, what is freed when
    siblings     tokens of siblings on other instances, from the draft servers
    speculator   what vLLM's runner calls instead of a draft model
    depth        how many drafts a step verifies: the budget over measured steps
    graphs       CUDA graphs for every depth
    sampler      accepts a draft exactly when plain vLLM would have sampled it
    install      the three names of vLLM that are replaced, each checked for the version at hand

Drafts never visit the host: asynchronous scheduling and full CUDA graphs stay on.
"""
