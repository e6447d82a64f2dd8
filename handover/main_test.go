// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"fmt"
	"os"
	"testing"

	"instar/internal/testutil"
)

func TestMain(m *testing.M) {
	if text := os.Getenv(appEnv); text != "" {
		os.Exit(appMain(text))
	}
	if os.Getenv(envFD) != "" {
		fmt.Fprintln(os.Stderr, "a test started its own binary as a successor: it has to set Options.Command")
		os.Exit(3)
	}
	testutil.Main(m)
}
