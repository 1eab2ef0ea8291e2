"""One row per request: what was asked, decided, answered and paid."""

from atoll.gateway.ledger.ledger import Ledger
from atoll.gateway.ledger.reader import Filters, Reader, Total
from atoll.gateway.ledger.row import LedgerRecord, LedgerRow
from atoll.gateway.ledger.writer import WriterStats

__all__ = ["Filters", "Ledger", "LedgerRecord", "LedgerRow", "Reader", "Total", "WriterStats"]
