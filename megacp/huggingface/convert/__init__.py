"""Between megacp and Hugging Face: tables of tensor names and config fields, walked in either
direction; tokenizers.
"""
