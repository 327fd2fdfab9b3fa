"""Mega MoE: dispatch, both expert products, SwiGLU and combine of a mixture of experts as one call.

``layout`` says where everything lies, ``routing`` which path a call takes, ``weights`` how experts are
stored, ``graph`` records calls, ``buffer`` holds the memory that ranks share, ``api`` the calls and
``baseline`` the unfused way to the same result. This file imports none of them, so that a backend which needs
``layout`` gets nothing else.
"""
