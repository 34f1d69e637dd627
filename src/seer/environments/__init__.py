# SPDX-License-Identifier: Apache-2.0
"""Environments: what a response talks to between its turns, and adapters for those that people use."""
