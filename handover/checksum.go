// SPDX-License-Identifier: Apache-2.0

package handover

import "hash/crc32"

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// checksum is the length and the CRC-32C (RFC 3720 appendix B.4) of a state.
type checksum struct {
	n   int64
	crc uint32
}

func (s *checksum) add(b []byte) {
	s.n += int64(len(b))
	s.crc = crc32.Update(s.crc, castagnoli, b)
}
