# SPDX-License-Identifier: Apache-2.0
"""Explains, replays and compares finished runs."""
