// SPDX-License-Identifier: Apache-2.0

package systemd

import (
	"os"
	"testing"

	"instar/internal/testutil"
)

func TestMain(m *testing.M) {
	if stage := os.Getenv(stageEnv); stage != "" {
		os.Exit(runStage(stage))
	}
	testutil.Main(m)
}
