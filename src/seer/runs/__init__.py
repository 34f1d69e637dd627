# SPDX-License-Identifier: Apache-2.0
"""One run: prompts in; responses with text and rewards, and a journal, out."""
