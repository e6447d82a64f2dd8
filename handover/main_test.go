// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"os"
	"testing"

	"instar/internal/testutil"
)

func TestMain(m *testing.M) {
	if text := os.Getenv(appEnv); text != "" {
		os.Exit(appMain(text))
	}
	testutil.Main(m)
}
