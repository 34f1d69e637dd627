# SPDX-License-Identifier: Apache-2.0
"""What happened: one event schema, its files, and the numbers computed from it."""
