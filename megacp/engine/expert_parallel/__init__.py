"""Mixture of experts: the router, the exchange of rows between ranks, and the experts."""
