"""All that trains from packs on any grid."""
