# SPDX-License-Identifier: Apache-2.0
"""The global KV pool: blocks of KV by key, shared by all instances (DRAM over SSD)."""
