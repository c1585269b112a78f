"""Images and videos as patches and tokens: the rules of each vision family, and the decoder they share."""
