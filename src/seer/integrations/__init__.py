# SPDX-License-Identifier: Apache-2.0
"""Adapters for trainers; each imports its trainer only when used."""
