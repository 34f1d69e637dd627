# SPDX-License-Identifier: Apache-2.0
"""Schedulers: which request runs next, where, and for how many tokens."""
