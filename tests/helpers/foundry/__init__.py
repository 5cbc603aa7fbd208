"""Evidence that is made and signed here: roots, chains, revocation lists, quotes, reports, collateral.

Each module makes one kind, with keys of its own, and takes what is to be wrong with it. Nothing in it uses
`fastrack.attest`, so that its tests have a second reading of every layout.
"""
