// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"os"
	"path/filepath"
	"testing"
)

// quicGoRaces are suppressions of the race detector. quic-go v0.65 has a race of its own: a
// stream that a client opens in early data reads the transport parameters that the
// handshake replaces meanwhile.
const quicGoRaces = `race:quic-go.(*Conn).handleTransportParameters
race:quic-go.(*Conn).applyTransportParameters
`

// WithoutQuicGoRaces is a value of the variable GORACE for programs that send early data: with
// it the race detector, where one is built in, keeps silent about quic-go's own race.
func WithoutQuicGoRaces(t testing.TB) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "suppressions")
	if err := os.WriteFile(file, []byte(quicGoRaces), 0o600); err != nil {
		t.Fatal(err)
	}
	return "suppressions=" + file
}
