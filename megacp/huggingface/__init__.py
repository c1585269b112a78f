"""To and from transformers: conversion, generation, and context parallelism for its models."""
